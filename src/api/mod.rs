//! The gRPC server: thin adapters over one [`broker`](crate::broker).
//!
//! ```text
//! server ──► connection ──► door ──► layers ──► native ──► broker
//! (threads)  (speaks, reads?)  (which)  (bounds)   (translates)
//! ```
//!
//! Each thread serves its own share of the connections with a runtime of its own. Nothing here decides about
//! messages: a handler decodes, calls the broker once, encodes.

mod connection;
mod door;
mod layers;
mod metrics;
mod native;
mod server;
mod socket;

pub use server::{Health, Server};

#[cfg(test)]
mod tests;
