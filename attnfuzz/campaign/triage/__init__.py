"""Failing cases: each is passed over, put off, or confirmed, shrunk and explained."""
