"""What a stated confidence is for: deciding before the answer is paid for, and serving what was decided."""
