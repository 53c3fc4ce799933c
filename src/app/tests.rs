use std::{
    collections::BTreeMap,
    fmt::Write as _,
    fs,
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpListener, TcpStream},
    path::Path,
    sync::Arc,
};

use crate::{
    app::{Node, Parts, StartError},
    client::{Batch, Connection, OutgoingMessage},
    config::{Config, Role, TelemetryConfig},
    runtime::SystemClock,
    store::disk::{Disk, Fault, FaultDisk, Operation, RealDisk},
    telemetry::{Exporters, Identity, Metrics},
};

fn config(dir: &Path) -> Config {
    let mut config = Config::defaults(Role::Standalone, &BTreeMap::new());
    config.node.data_dir = dir.to_owned();
    config.listen.api = SocketAddr::from(([127, 0, 0, 1], 0));
    config.listen.probe = SocketAddr::from(([127, 0, 0, 1], 0));
    config.api.threads = 1;
    config.store.disk_floor = 0;
    config
}

fn parts(disk: impl Disk + 'static) -> Parts {
    let identity = Identity {
        service: "holdfast-broker",
        node_type: "broker",
        cluster: "demo".into(),
        node: "demo-0".into(),
        shard: "main".into(),
    };
    let (telemetry, environment) = (TelemetryConfig::default(), BTreeMap::new());
    let metrics = Metrics::new(&telemetry, &identity, &Exporters::default(), &environment).unwrap();
    Parts { disk: Arc::new(disk), clock: Arc::new(SystemClock::new()), metrics, logs: None }
}

async fn send(node: &Node, body: &str) -> Result<(), crate::client::Error> {
    let connection = Connection::new(node.api().to_string().parse().unwrap()).unwrap();
    let messages = vec![OutgoingMessage::new(body.to_owned())];
    connection.send(Batch { queue: Some(0), ..Batch::new("t", messages) }).await.map(drop)
}

async fn get(address: SocketAddr, path: &str) -> String {
    let request = format!("GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n");
    tokio::task::spawn_blocking(move || {
        let mut stream = TcpStream::connect(address).unwrap();
        stream.write_all(request.as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    })
    .await
    .unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_serves_stops_and_finds_its_data_again() {
    let dir = tempfile::tempdir().unwrap();
    // An address of its own: tests beside this one take whatever port becomes free.
    let mut config = config(dir.path());
    config.listen.api.set_ip([127, 0, 0, 9].into());
    config.listen.probe.set_ip([127, 0, 0, 9].into());
    let node = Node::start(config.clone(), parts(RealDisk)).await.unwrap();
    assert!(get(node.probe(), "/readyz").await.starts_with("HTTP/1.1 200 "));
    assert!(get(node.probe(), "/livez").await.starts_with("HTTP/1.1 200 "));
    send(&node, "kept").await.unwrap();
    let metrics = get(node.probe(), "/metrics").await;
    assert!(metrics.contains("\nrocketmq_messages_in_total{"), "{metrics}");
    assert_eq!(node.store().topics, 1);
    let (api, probe) = (node.api(), node.probe());
    node.stop().await;
    assert!(TcpStream::connect(api).is_err() && TcpStream::connect(probe).is_err(), "nobody listens");

    let node = Node::start(config, parts(RealDisk)).await.unwrap();
    assert_eq!((node.store().topics, node.store().epoch), (1, 2));
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_port_in_use_is_named_with_what_to_change_and_nothing_stays_open() {
    let dir = tempfile::tempdir().unwrap();
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    for (is_api, key) in [(true, "listen.api"), (false, "listen.probe")] {
        let mut config = config(dir.path());
        let listen = if is_api { &mut config.listen.api } else { &mut config.listen.probe };
        *listen = taken.local_addr().unwrap();
        let error = Node::start(config, parts(RealDisk)).await.err().unwrap();
        assert!(matches!(error, StartError::Listen { .. }), "{error}");
        let text = error.to_string();
        assert!(text.contains(key) && text.contains(&taken.local_addr().unwrap().to_string()), "{text}");
        assert!(!text.contains('\n'), "{text}");
    }
    Node::start(config(dir.path()), parts(RealDisk)).await.unwrap().stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_second_node_on_the_same_data_is_refused_and_the_first_lives_on() {
    let dir = tempfile::tempdir().unwrap();
    let node = Node::start(config(dir.path()), parts(RealDisk)).await.unwrap();
    let error = Node::start(config(dir.path()), parts(RealDisk)).await.err().unwrap().to_string();
    assert!(error.contains("in use") && error.contains(dir.path().to_str().unwrap()), "{error}");
    send(&node, "still here").await.unwrap();
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_whose_disk_failed_is_alive_but_not_ready() {
    let dir = tempfile::tempdir().unwrap();
    let disk = FaultDisk::new(Arc::new(RealDisk));
    let node = Node::start(config(dir.path()), parts(disk.clone())).await.unwrap();
    send(&node, "good").await.unwrap();
    disk.inject(Fault::device(Operation::Sync).on("log"));
    send(&node, "lost").await.unwrap_err();
    let ready = get(node.probe(), "/readyz?verbose").await;
    assert!(ready.starts_with("HTTP/1.1 503 ") && ready.contains("fenced"), "{ready}");
    assert!(get(node.probe(), "/livez").await.starts_with("HTTP/1.1 200 "), "a restart loop helps nobody");
    node.stop().await;
}

/// Every instrument that the rooms make, in the order of their names.
mod golden {
    use std::sync::Mutex;

    use opentelemetry::metrics::{
        AsyncInstrumentBuilder, Counter, Gauge, Histogram, HistogramBuilder, InstrumentBuilder,
        InstrumentProvider, Meter, MeterProvider as _, NoopMeterProvider, ObservableCounter, ObservableGauge,
        ObservableUpDownCounter, UpDownCounter,
    };

    use super::*;
    use crate::{
        api, broker,
        hold::{Hold, Limits},
        store::{Options, Store},
        telemetry::{Health, observe_node},
    };

    /// Written anew by a run of the test with `BLESS=1`.
    const GOLDEN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/metrics.txt");

    #[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
    struct Made {
        name: String,
        kind: &'static str,
        unit: String,
        description: String,
        rocketmq: bool,
    }

    #[derive(Clone, Default)]
    struct Recorder {
        made: Arc<Mutex<Vec<Made>>>,
        rocketmq: bool,
    }

    macro_rules! record {
        ($($kind:literal $method:ident($builder:ty) -> $instrument:ty;)*) => {
            $(fn $method(&self, builder: $builder) -> $instrument {
                self.made.lock().unwrap().push(Made {
                    name: builder.name.to_string(),
                    kind: $kind,
                    unit: builder.unit.as_deref().unwrap_or_default().into(),
                    description: builder.description.as_deref().unwrap_or_default().into(),
                    rocketmq: self.rocketmq,
                });
                NoopMeterProvider::new().meter("none").$method(builder.name.clone()).build()
            })*
        };
    }

    impl InstrumentProvider for Recorder {
        record! {
            "counter" u64_counter(InstrumentBuilder<'_, Counter<u64>>) -> Counter<u64>;
            "counter" f64_counter(InstrumentBuilder<'_, Counter<f64>>) -> Counter<f64>;
            "counter" u64_observable_counter(AsyncInstrumentBuilder<'_, ObservableCounter<u64>, u64>) -> ObservableCounter<u64>;
            "counter" f64_observable_counter(AsyncInstrumentBuilder<'_, ObservableCounter<f64>, f64>) -> ObservableCounter<f64>;
            "gauge" i64_up_down_counter(InstrumentBuilder<'_, UpDownCounter<i64>>) -> UpDownCounter<i64>;
            "gauge" f64_up_down_counter(InstrumentBuilder<'_, UpDownCounter<f64>>) -> UpDownCounter<f64>;
            "gauge" i64_observable_up_down_counter(AsyncInstrumentBuilder<'_, ObservableUpDownCounter<i64>, i64>) -> ObservableUpDownCounter<i64>;
            "gauge" f64_observable_up_down_counter(AsyncInstrumentBuilder<'_, ObservableUpDownCounter<f64>, f64>) -> ObservableUpDownCounter<f64>;
            "gauge" u64_gauge(InstrumentBuilder<'_, Gauge<u64>>) -> Gauge<u64>;
            "gauge" f64_gauge(InstrumentBuilder<'_, Gauge<f64>>) -> Gauge<f64>;
            "gauge" i64_gauge(InstrumentBuilder<'_, Gauge<i64>>) -> Gauge<i64>;
            "gauge" u64_observable_gauge(AsyncInstrumentBuilder<'_, ObservableGauge<u64>, u64>) -> ObservableGauge<u64>;
            "gauge" f64_observable_gauge(AsyncInstrumentBuilder<'_, ObservableGauge<f64>, f64>) -> ObservableGauge<f64>;
            "gauge" i64_observable_gauge(AsyncInstrumentBuilder<'_, ObservableGauge<i64>, i64>) -> ObservableGauge<i64>;
            "histogram" u64_histogram(HistogramBuilder<'_, Histogram<u64>>) -> Histogram<u64>;
            "histogram" f64_histogram(HistogramBuilder<'_, Histogram<f64>>) -> Histogram<f64>;
        }
    }

    fn all() -> Vec<Made> {
        let holdfast = Recorder::default();
        let rocketmq = Recorder { made: Arc::clone(&holdfast.made), rocketmq: true };
        let made = Arc::clone(&holdfast.made);
        let meter = Meter::new(Arc::new(holdfast));
        let meters = broker::Meters { rocketmq: Meter::new(Arc::new(rocketmq)), holdfast: meter.clone() };

        observe_node(&meter, &Health::new(), None);
        let dir = tempfile::tempdir().unwrap();
        let config = config(dir.path());
        let hold = Hold::new(Limits::default(), &meter);
        let (options, clock) = (Options::new(dir.path(), "main"), Arc::new(SystemClock::new()));
        let store =
            Store::open(options, Arc::new(RealDisk), clock.clone(), broker::news(&hold), &meter).unwrap();
        let broker = broker::Broker::new(store.clone(), hold, config.broker(), clock, &meters);
        let server = api::Server::start(config.listen.api, "demo-0", broker, &config.api, &meter).unwrap();
        drop(server);
        store.close();
        let mut made = made.lock().unwrap().clone();
        made.sort();
        made
    }

    #[test]
    fn metrics_have_the_names_types_and_units_that_dashboards_know() {
        let mut text =
            String::from("# name | type | unit; names are public: renaming one breaks dashboards\n");
        let mut lines: Vec<String> =
            all().iter().map(|made| format!("{} | {} | {}", made.name, made.kind, made.unit)).collect();
        lines.dedup();
        for line in lines {
            writeln!(text, "{}", line.trim_end()).unwrap();
        }
        if std::env::var_os("BLESS").is_some() {
            fs::write(GOLDEN, &text).unwrap();
        }
        let golden = fs::read_to_string(GOLDEN).unwrap_or_default();
        assert_eq!(text, golden, "differs from {GOLDEN}; BLESS=1 writes it anew");
    }

    #[test]
    fn metrics_follow_the_rules_of_prometheus() {
        let units = ["", "s", "ms", "By", "1"];
        let words = ["seconds", "milliseconds", "bytes", "ratio"];
        let mut wrong = Vec::new();
        let made = all();
        for metric in &made {
            let Made { name, kind, unit, description, rocketmq } = metric;
            let mut complain = |problem: &str| wrong.push(format!("{name}: {problem}"));
            if description.is_empty() {
                complain("has no description");
            }
            if *rocketmq != name.starts_with("rocketmq_") {
                complain("is made with the wrong meter");
            }
            if *rocketmq && (*kind == "counter") != name.ends_with("_total") {
                complain("a counter of RocketMQ ends in `_total`, and nothing else does");
            }
            let annotation = unit.starts_with('{') && unit.ends_with('}');
            if !annotation && !units.contains(&unit.as_str()) {
                complain("has a unit that the exporter does not know");
            }
            if !rocketmq {
                let good = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || matches!(c, '.' | '_');
                if !name.chars().all(good) {
                    complain("is not lower case with dots");
                }
                let last = name.rsplit(['.', '_']).next().unwrap_or_default();
                if last == "total" || words.contains(&last) {
                    complain("ends in what the exporter appends");
                }
            }
        }
        for pair in made.windows(2) {
            if let [a, b] = pair
                && a.name == b.name
                && (a.kind, &a.unit, &a.description) != (b.kind, &b.unit, &b.description)
            {
                wrong.push(format!("{}: made twice, differently", a.name));
            }
        }
        assert!(wrong.is_empty(), "\n{}\n", wrong.join("\n"));
    }
}
