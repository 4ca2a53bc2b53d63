"""The mathematics: numbers in, numbers out."""
