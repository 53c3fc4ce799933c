//! The `holdfast` binary.

use std::process::ExitCode;

/// Gives memory back after a crowd of waiting pulls has gone.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    // The allocator asks for huge pages; with a heap a thread they would make an idle broker four times as large.
    #[cfg(target_os = "linux")]
    let _ = rustix::thread::disable_transparent_huge_pages(true);
    holdfast::cli::main()
}
