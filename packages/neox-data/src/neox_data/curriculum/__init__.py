"""Curricula: easy samples first, by any measure; or short ones first."""
