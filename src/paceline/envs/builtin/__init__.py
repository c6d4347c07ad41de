"""Small environments that need nothing but Paceline. Each module opens with its rules, as pure functions."""
