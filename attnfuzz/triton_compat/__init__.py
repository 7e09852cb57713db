"""Every private part of Triton that attnfuzz touches, one module for each purpose.

Each looks first whether the installed Triton has what it knows, and changes nothing where it has not.
"""
