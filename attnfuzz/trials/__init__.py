"""A kernel on a case: the runs, what they should have given, and what differs. No oracle has looked at that yet."""
