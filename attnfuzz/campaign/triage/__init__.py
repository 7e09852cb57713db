"""What is done with a case that fails: passed over, put off, or confirmed, shrunk and explained."""
