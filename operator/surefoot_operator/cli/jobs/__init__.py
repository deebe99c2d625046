"""Says how jobs stand: pure judgements and renderings, one file a command."""
