"""Figures from raw measurements: deviations, KL divergence, times, intervals."""
