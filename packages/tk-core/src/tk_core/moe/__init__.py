"""Mixture-of-experts routing."""
