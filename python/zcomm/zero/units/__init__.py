"""Stage 3 by units: modules with parameters that are gathered around their use."""
