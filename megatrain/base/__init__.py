"""What every room may use: checks of arguments, sizes, progress, private names of torch, functions of C."""
