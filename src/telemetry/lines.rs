//! Carries finished log lines to a stream on a thread of its own, so that a reader who stalls stalls nobody else.

use std::{
    io::{self, Write},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
        mpsc::{Receiver, SyncSender, TrySendError, sync_channel},
    },
    thread,
    time::Duration,
};

use tracing_subscriber::fmt::MakeWriter;

/// Lines that may wait; more are dropped and counted.
const MAX_LINES: usize = 8192;
/// Longest that a stop waits for the stream to take what is left.
const FLUSH_MAX: Duration = Duration::from_secs(1);

enum Item {
    Line(Vec<u8>),
    /// Everything before this has been written when the answer comes.
    Flush(SyncSender<()>),
}

/// Takes lines and never waits. All clones are the same.
#[derive(Clone, Debug)]
pub(super) struct Lines {
    to: SyncSender<Item>,
    dropped: Arc<AtomicU64>,
}

impl Lines {
    /// Starts the thread that writes to `stream`. It ends with the process.
    pub(super) fn start(stream: impl Write + Send + 'static) -> io::Result<Self> {
        let (to, from) = sync_channel(MAX_LINES);
        thread::Builder::new().name("log-lines".into()).spawn(move || carry(&from, stream))?;
        Ok(Self { to, dropped: Arc::default() })
    }

    /// Takes one line with its end.
    pub(super) fn push(&self, line: Vec<u8>) {
        if let Err(TrySendError::Full(_) | TrySendError::Disconnected(_)) = self.to.try_send(Item::Line(line))
        {
            self.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Lines that nobody will see.
    pub(super) fn dropped(&self) -> u64 {
        self.dropped.load(Ordering::Relaxed)
    }

    /// Waits until what was taken is written, but not for long.
    pub(super) fn flush(&self) {
        let (done, wait) = sync_channel(1);
        let begun = std::time::Instant::now();
        let mut item = Item::Flush(done);
        loop {
            match self.to.try_send(item) {
                Ok(()) => break,
                Err(TrySendError::Full(back)) if begun.elapsed() < FLUSH_MAX => {
                    item = back;
                    thread::sleep(Duration::from_millis(1));
                }
                Err(_) => return,
            }
        }
        // A reader that does not come back is not worth a hanging stop.
        let _ = wait.recv_timeout(FLUSH_MAX);
    }
}

fn carry(from: &Receiver<Item>, mut stream: impl Write) {
    while let Ok(first) = from.recv() {
        let mut done = Vec::new();
        let mut bytes = Vec::new();
        for item in std::iter::once(first).chain(from.try_iter().take(MAX_LINES)) {
            match item {
                Item::Line(line) => bytes.extend_from_slice(&line),
                Item::Flush(answer) => done.push(answer),
            }
        }
        // Where the log cannot be written there is nowhere to say so.
        let _ = stream.write_all(&bytes).and_then(|()| stream.flush());
        for answer in done {
            let _ = answer.send(());
        }
    }
}

/// One line being made.
#[derive(Debug)]
pub(super) struct Line<'a> {
    lines: &'a Lines,
    bytes: Vec<u8>,
}

impl Write for Line<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.bytes.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Drop for Line<'_> {
    fn drop(&mut self) {
        if !self.bytes.is_empty() {
            self.lines.push(std::mem::take(&mut self.bytes));
        }
    }
}

impl<'a> MakeWriter<'a> for Lines {
    type Writer = Line<'a>;

    fn make_writer(&'a self) -> Line<'a> {
        Line { lines: self, bytes: Vec::new() }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Condvar, Mutex};

    use super::*;

    #[derive(Clone, Default)]
    #[allow(clippy::type_complexity)] // open or not, what came through; and who waits
    struct Gate(Arc<(Mutex<(bool, Vec<u8>)>, Condvar)>);

    impl Write for Gate {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let mut state = self.0.0.lock().unwrap();
            while !state.0 {
                state = self.0.1.wait(state).unwrap();
            }
            state.1.extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_stream_that_stalls_costs_lines_and_no_time() {
        let gate = Gate::default();
        let lines = Lines::start(gate.clone()).unwrap();
        for _ in 0..3 * MAX_LINES {
            lines.push(b"x\n".to_vec());
        }
        let dropped = lines.dropped();
        assert!(dropped > 0);
        gate.0.0.lock().unwrap().0 = true;
        gate.0.1.notify_all();
        lines.flush();
        let written = gate.0.0.lock().unwrap().1.len();
        assert_eq!(written as u64 / 2 + dropped, 3 * MAX_LINES as u64);
    }
}
