//! Files in memory.
/// Files in memory.
#[derive(Debug)]
pub struct MemoryDisk;
/// What a crash keeps.
#[derive(Debug)]
pub enum CrashKeeps {}
