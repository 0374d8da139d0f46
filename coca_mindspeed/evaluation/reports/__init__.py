"""What people look at: tables, pictures, reports, a running training."""
