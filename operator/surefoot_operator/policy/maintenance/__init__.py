"""What is done for a job while it trains: copies, promotion, retention, intervals."""
