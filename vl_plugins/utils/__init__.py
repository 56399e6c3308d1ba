"""What every layer may use: errors, argument checks, optional imports."""
