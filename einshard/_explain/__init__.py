"""What the compiler made of a function: `explain`, `assert_collectives`, golden files."""
