//! The `holdfast` binary.

use std::process::ExitCode;

/// Gives memory back after a crowd of waiting pulls has gone.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    holdfast::cli::main()
}
