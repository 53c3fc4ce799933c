//! Breaks a disk on purpose.
/// Breaks.
#[derive(Debug)]
pub struct FaultDisk;
/// A fault.
#[derive(Debug)]
pub struct Fault;
/// A kind of call.
#[derive(Debug)]
pub enum Operation {}
