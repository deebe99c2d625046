"""Creates, stores and checks secrets, certificates and tokens."""
