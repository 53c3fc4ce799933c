//! `holdfast.v1` on the wire: each call is decoded, made once, and its outcome encoded.
//!
//! `unary` reads and answers single calls and `stream` streams; `codec` and `wire` translate what is hot
//! without generated types, `convert` the rest, `status` errors.

mod admin;
mod broker;
mod codec;
mod convert;
pub(super) mod status;
mod stream;
mod unary;
mod wire;

pub(super) use admin::AdminApi;
pub(super) use broker::{BrokerApi, Caller};
pub(super) use stream::StreamLimits;
