"""The pytest plugin: collects saved regression files. Imports the framework only inside hooks."""
