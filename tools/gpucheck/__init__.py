"""`make gpu-check`: parts with budgets (parts.py, work.py), run one by one (runner.py), kept and shown (page.py).

Standard library only: it runs before zcomm is built, with the machine's Python.
"""
