"""What the loop does beside training, one hook per file."""
