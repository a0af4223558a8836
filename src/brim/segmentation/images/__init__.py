"""Images in and results out, in the formats of the field."""
