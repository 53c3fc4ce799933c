//! What every call passes through, whatever it asks for.
//!
//! ```text
//! HTTP/2 ──► timeout ──► framing ──► handler ──┐
//!        (is there time?)  (whole, in bounds)  │ panic? too late?
//! HTTP/2 ◄── outgoing ◄── call ◄───────────────┘
//!        (ends streams at a stop)  (measures)
//! ```

mod budget;
mod call;
mod framing;
mod outgoing;
mod timeout;

pub(super) use budget::{AnswerBudget, Budget, Held, Owed, RETRY};
pub(super) use call::{Call, Handling, Measure, StopRule};
pub(super) use framing::{Framed, Limits};
pub(super) use outgoing::Outgoing;
pub(super) use timeout::grpc_timeout;
