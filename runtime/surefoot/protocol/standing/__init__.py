"""Says where ranks stand, which one stands elsewhere, which works longest."""
