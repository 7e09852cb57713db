"""Decode of recurrent layers."""
