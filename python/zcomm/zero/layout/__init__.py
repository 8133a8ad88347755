"""Layout: the place of each parameter in flat buckets, sections, tiles and units. Pure arithmetic."""
