"""Commands that show one job or change it, and the data that they read."""
