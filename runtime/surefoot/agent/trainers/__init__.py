"""The trainers of one agent: started, watched, reaped, and what their ends mean."""
