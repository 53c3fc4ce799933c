//! Holdfast: a durable message broker that speaks gRPC only.
//!
//! Data goes one way round. No room knows who stands above it; news travels up as plain values.
//!
//! ```text
//! call   ──► api ──► broker ──► store: log ─► dispatch ─► queues
//!              ▲        ▲                        │ "orders/3 now ends at 812"
//! answer ◄─────┘        └───────── hold ◄────────┘
//! ```
//!
//! | room | in one sentence |
//! |---|---|
//! | [`model`] | The words of the domain, checked when made; no I/O. |
//! | [`runtime`] | What code must be given and never fetch: the clock, background tasks, wake-ups. |
//! | [`pb`] | Code generated from `proto/`, and the codec it uses. |
//! | [`config`] | One plain struct a room, and the loader. |
//! | [`telemetry`] | Starts logs and metrics; serves `/metrics` and the probes. |
//! | [`store`] | What is on disk: log, queues, key index, state, recovery, retention. |
//! | [`hold`] | Pulls wait here until their queue grows. |
//! | [`broker`] | What a broker does, one verb a file. |
//! | [`client`] | Our client over the native API. |
//! | [`api`] | The gRPC server: adapters over one [`broker`]. |
//! | [`app`] | The wiring, one file a role. |
//! | [`cli`] | The subcommands of `holdfast`. |

pub mod api;
pub mod app;
pub mod broker;
pub mod cli;
pub mod client;
pub mod config;
pub mod hold;
pub mod model;
pub mod pb;
pub mod runtime;
pub mod store;
pub mod telemetry;
