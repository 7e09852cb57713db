"""How results are shown: terminal, JSON, JUnit, HTML, the picture of a case, and repro scripts."""
