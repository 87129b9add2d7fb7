"""Rare features, a folder for each: the declarations of their parameters, their rules, and what these ask."""
