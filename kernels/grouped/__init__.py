"""Decode at the speed of memory: the query heads of a KV head in one program."""
