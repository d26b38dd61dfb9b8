"""Figures from raw measurements: deviations, KL divergence, intervals."""
