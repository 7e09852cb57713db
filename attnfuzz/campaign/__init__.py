"""The search for bugs: several workers draw cases within a budget, and what fails is confirmed, shrunk and saved.

A case goes through stations: it is drawn (`draw`), judged (`judge`), and if it fails looked into (`triage`), told from
other bugs (`identity`) and kept (`saved`). The coordinator (`coordinator`) runs in the command's process and owns the
budget, the findings and the files. Workers (`worker`) are processes that draw cases with Hypothesis and have them
judged in executors. All of it is torch-free.
"""
