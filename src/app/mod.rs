//! The wiring: opens the rooms in order, closes them in reverse.
//!
//! ```text
//! configuration ─► telemetry ─► probes answer "starting" ─► store ─► hold, broker ─► gRPC server ─► ready
//! ```
//!
//! A role is a file: [`standalone`] and [`broker`] start the same [`Node`]. Nothing here knows messages.

pub mod broker;
mod host;
mod node;
mod process;
pub mod standalone;

pub use node::{Node, Parts, StartError};
pub use process::Started;

#[cfg(test)]
mod tests;
