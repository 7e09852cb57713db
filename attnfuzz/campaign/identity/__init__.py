"""Which bug a failure is, and which findings are one."""
