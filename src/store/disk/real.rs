//! The operating system's files.
/// The operating system's files.
#[derive(Debug)]
pub struct RealDisk;
