//! What code must be given and never fetch: the clock, and wake-ups that are cheap in crowds.

mod clock;
mod wake;

pub use clock::{Clock, ManualClock, SystemClock};
pub use wake::{WakeHub, WakerSet};
