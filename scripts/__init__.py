"""What a person runs beside training."""
