"""Curriculum learning: easy samples first, by any measure of difficulty, or short samples first."""
