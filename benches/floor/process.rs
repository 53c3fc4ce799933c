//! Other processes on this machine: starting and ending them, their CPU time and memory.

use std::{
    collections::BTreeMap,
    fs, io,
    io::{BufRead as _, BufReader, Read as _, Write as _},
    net::{SocketAddr, TcpListener, TcpStream},
    path::{Path, PathBuf},
    process::{Child, ChildStdin, Command, Stdio},
    time::{Duration, Instant},
};

use holdfast::client::Connection;

use crate::{Error, Result};

/// Longest wait for a server to serve.
const START_MAX: Duration = Duration::from_secs(30);

/// A server under load, in a process of its own. It ends with this value.
pub struct Server {
    /// Where it serves.
    pub address: SocketAddr,
    /// Where it tells its metrics, if it has any.
    metrics: Option<SocketAddr>,
    child: Child,
    /// A reference ends when this is closed, also when this process dies.
    _stdin: Option<ChildStdin>,
}

impl Server {
    /// This program again as one of the references.
    pub fn reference(mode: &str, dir: &Path) -> Result<Self> {
        let mut child = Command::new(std::env::current_exe()?)
            .args(["--serve", mode, "--dir"])
            .arg(dir)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let stdin = child.stdin.take();
        let mut line = String::new();
        if let Some(stdout) = child.stdout.take() {
            BufReader::new(stdout).read_line(&mut line)?;
        }
        let address = line.trim().parse().map_err(|_| format!("reference {mode} did not start"))?;
        Ok(Self { address, metrics: None, child, _stdin: stdin })
    }

    /// The product, as anybody starts it.
    pub fn product(binary: &Path, dir: &Path, settings: &[String]) -> Result<Self> {
        let (address, metrics) = (free_address()?, free_address()?);
        let log = fs::File::create(dir.join("holdfast.log"))?;
        let mut command = Command::new(binary);
        command
            .arg("standalone")
            .arg("--data-dir")
            .arg(dir.join("data"))
            .args(["--listen", &address.to_string()])
            .args(["--set", &format!("listen.probe={metrics}")])
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log);
        for setting in settings {
            command.args(["--set", setting]);
        }
        let child =
            command.spawn().map_err(|error| format!("{} cannot be started: {error}", binary.display()))?;
        let mut server = Self { address, metrics: Some(metrics), child, _stdin: None };
        server.wait_until_it_serves(dir)?;
        Ok(server)
    }

    fn wait_until_it_serves(&mut self, dir: &Path) -> Result<()> {
        let begun = Instant::now();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        loop {
            let status = runtime.block_on(async {
                Connection::new(self.address.to_string().parse()?)?.node_status().await.map_err(Error::from)
            });
            match status {
                Ok(_) => return Ok(()),
                Err(error) if self.child.try_wait()?.is_some() || begun.elapsed() > START_MAX => {
                    let said = fs::read_to_string(dir.join("holdfast.log")).unwrap_or_default();
                    return Err(format!("holdfast does not serve: {error}\n{said}").into());
                }
                Err(_) => std::thread::sleep(Duration::from_millis(5)),
            }
        }
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// CPU time it has used, all its threads, to the nanosecond.
    pub fn cpu(&self) -> Result<Duration> {
        // How the kernel writes "the CPU clock of that process" as a clock id.
        let pid = i32::try_from(self.child.id())?;
        cpu_of((!pid << 3) | 2)
    }

    /// CPU time of its threads that are there, by name without a number at the end.
    pub fn threads(&self) -> Result<BTreeMap<String, Duration>> {
        let mut found = BTreeMap::new();
        for task in fs::read_dir(format!("/proc/{}/task", self.child.id()))? {
            let task = task?.path();
            // A thread may end between the two.
            let Ok(name) = fs::read_to_string(task.join("comm")) else { continue };
            let Ok(times) = fs::read_to_string(task.join("schedstat")) else { continue };
            let ran = times.split(' ').next().and_then(|ns| ns.parse().ok()).unwrap_or(0);
            let name = name.trim().trim_end_matches(|c: char| c.is_ascii_digit() || c == '-');
            *found.entry(name.to_owned()).or_default() += Duration::from_nanos(ran);
        }
        Ok(found)
    }

    /// Resident memory: now, and at most, in bytes.
    pub fn memory(&self) -> Result<(u64, u64)> {
        let status = fs::read_to_string(format!("/proc/{}/status", self.child.id()))?;
        let field = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name))?;
            line.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok().map(|kib| kib << 10)
        };
        field("VmRSS:").zip(field("VmHWM:")).ok_or_else(|| "the memory of the server is not told".into())
    }

    /// How often it has synced, and how many bytes.
    pub fn syncs(&self) -> Result<Option<Syncs>> {
        let Some(address) = self.metrics else { return Ok(None) };
        let mut stream = TcpStream::connect(address)?;
        stream.write_all(b"GET /metrics HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")?;
        let mut text = String::new();
        stream.read_to_string(&mut text)?;
        let sum = |name: &str| {
            let values = text.lines().filter(|line| line.starts_with(name));
            values.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum::<f64>()
        };
        Ok(Some(Syncs {
            count: sum("holdfast_storage_fsync_size_bytes_count"),
            bytes: sum("holdfast_storage_fsync_size_bytes_sum"),
        }))
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Its data goes with its directory; there is nothing to end well for.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// What a server has synced since its start.
#[derive(Clone, Copy, Debug)]
pub struct Syncs {
    pub count: f64,
    pub bytes: f64,
}

/// CPU time of this process.
pub fn own_cpu() -> Result<Duration> {
    cpu_of(libc::CLOCK_PROCESS_CPUTIME_ID)
}

fn cpu_of(clock: libc::clockid_t) -> Result<Duration> {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` outlives the call, which writes nothing else.
    if unsafe { libc::clock_gettime(clock, &raw mut time) } != 0 {
        return Err(format!("the CPU time is not told: {}", io::Error::last_os_error()).into());
    }
    Ok(Duration::new(u64::try_from(time.tv_sec)?, u32::try_from(time.tv_nsec)?))
}

/// Time that all cores together were busy, and that a hypervisor kept from them.
pub fn machine() -> Result<(Duration, Duration)> {
    let stat = fs::read_to_string("/proc/stat")?;
    let line = stat.lines().next().unwrap_or_default();
    let fields: Vec<u64> = line.split_ascii_whitespace().skip(1).filter_map(|f| f.parse().ok()).collect();
    let [user, nice, system, _idle, _iowait, irq, softirq, stolen, ..] = fields[..] else {
        return Err(format!("/proc/stat begins with `{line}`").into());
    };
    let ticks = |ticks: u64| Duration::from_millis(ticks * 1000 / rustix::param::clock_ticks_per_second());
    Ok((ticks(user + nice + system + irq + softirq), ticks(stolen)))
}

/// Waits until what was written has reached the device, so that one measurement does not pay for another.
pub fn settle(dir: &Path) -> Result<()> {
    rustix::fs::syncfs(fs::File::open(dir)?)?;
    std::thread::sleep(Duration::from_millis(200));
    Ok(())
}

/// The binary to measure: as said, else the one that cargo built beside this program.
pub fn binary(said: Option<PathBuf>) -> PathBuf {
    said.unwrap_or_else(|| env!("CARGO_BIN_EXE_holdfast").into())
}

fn free_address() -> Result<SocketAddr> {
    Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?)
}

/// Ends this process when the one that started it closes the pipe or dies.
pub fn end_with_parent() {
    std::thread::spawn(|| {
        let _ = io::stdin().read_to_end(&mut Vec::new());
        std::process::exit(0);
    });
}
