"""Other libraries' ways of saving and loading, served by this engine. Each module is imported by who uses that library."""
