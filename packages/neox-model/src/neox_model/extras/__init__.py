"""Rare features, a folder for each.

The core imports none of them. Its tables name what a configuration may ask for, which is loaded then.
"""
