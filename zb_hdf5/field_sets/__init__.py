"""Field sets as jobs make them: claims on parts, records that are missing, and values that are written."""
