//! Metrics: two meters for the rooms, one text for whoever asks.
//!
//! The names of RocketMQ 5 are kept exactly as they are, ours follow the usual rules, and the exporter cannot do
//! both at once: hence two providers, each with its registry.
//!
//! | provider | names | counters |
//! |---|---|---|
//! | R | `rocketmq_…`, as they are | end in `_total` already |
//! | H | `holdfast.…`, `rpc.…`, `process.…`, dotted | get their `_total` |

use std::collections::{BTreeMap, HashMap};

use opentelemetry::{
    KeyValue,
    metrics::{Meter, MeterProvider as _},
};
use opentelemetry_sdk::{
    Resource,
    metrics::{Instrument, MeterProviderBuilder, SdkMeterProvider, Stream},
    resource::{EnvResourceDetector, TelemetryResourceDetector},
};
use prometheus::{Encoder as _, Registry, TextEncoder};

use super::{COMMIT, Exporters, Health, Identity, Logs, Phase, RUSTC, VERSION, process};
use crate::config::TelemetryConfig;

/// Scope of the names of RocketMQ; its own name for it.
const ROCKETMQ_SCOPE: &str = "broker-meter";
/// Attributes that the environment of a pod gives.
const KUBERNETES: [(&str, &str); 6] = [
    ("K8S_NAMESPACE_NAME", "k8s.namespace.name"),
    ("K8S_POD_NAME", "k8s.pod.name"),
    ("K8S_POD_UID", "k8s.pod.uid"),
    ("K8S_NODE_NAME", "k8s.node.name"),
    ("K8S_STATEFULSET_NAME", "k8s.statefulset.name"),
    ("K8S_CONTAINER_NAME", "k8s.container.name"),
];

/// All metrics of this node. All clones are the same.
#[derive(Clone, Debug)]
pub struct Metrics {
    rocketmq: (SdkMeterProvider, Registry),
    holdfast: (SdkMeterProvider, Registry),
}

impl Metrics {
    /// Providers for a node; its common labels are on every series.
    pub fn new(
        config: &TelemetryConfig,
        identity: &Identity,
        exporters: &Exporters,
        environment: &BTreeMap<String, String>,
    ) -> Result<Self, String> {
        let resource = resource(identity, environment);
        let make = |rocketmq: bool| -> Result<(SdkMeterProvider, Registry), String> {
            let registry = Registry::new_custom(None, Some(common_labels(identity)))
                .map_err(|error| format!("metrics: {error}"))?;
            let mut builder = SdkMeterProvider::builder().with_resource(resource.clone());
            if exporters.prometheus {
                let mut exporter = opentelemetry_prometheus::exporter()
                    .with_registry(registry.clone())
                    .scope_info_enabled(false);
                if rocketmq {
                    exporter = exporter.without_counter_suffixes().without_target_info();
                }
                let exporter = exporter.build().map_err(|error| format!("metrics: {error}"))?;
                builder = limited(builder.with_reader(exporter), config.max_series_per_metric);
            }
            Ok((builder.build(), registry))
        };
        Ok(Self { rocketmq: make(true)?, holdfast: make(false)? })
    }

    /// For names that begin with `rocketmq_`.
    pub fn rocketmq(&self) -> Meter {
        self.rocketmq.0.meter(ROCKETMQ_SCOPE)
    }

    /// For all other names. The scope is that of a room, as `holdfast.storage`.
    pub fn scope(&self, scope: &'static str) -> Meter {
        self.holdfast.0.meter(scope)
    }

    /// All series in Prometheus' text format.
    pub fn text(&self) -> Result<Vec<u8>, String> {
        let mut text = Vec::new();
        for (_, registry) in [&self.rocketmq, &self.holdfast] {
            TextEncoder::new()
                .encode(&registry.gather(), &mut text)
                .map_err(|error| format!("metrics: {error}"))?;
        }
        Ok(text)
    }
}

/// Makes the instruments that belong to the node as a whole.
pub fn observe_node(meter: &Meter, health: &Health, logs: Option<Logs>) {
    meter
        .u64_observable_gauge("holdfast.build.info")
        .with_description("What this node was built from; always 1")
        .with_callback(|to| {
            let attributes = [
                KeyValue::new("version", VERSION),
                KeyValue::new("commit", COMMIT),
                KeyValue::new("rustc", RUSTC),
            ];
            to.observe(1, &attributes);
        })
        .build();
    let health = health.clone();
    meter
        .u64_observable_gauge("holdfast.node.state")
        .with_description("1 for the state that the node is in")
        .with_callback(move |to| {
            let now = health.phase();
            for phase in Phase::ALL {
                to.observe(u64::from(phase == now), &[KeyValue::new("state", phase.name())]);
            }
        })
        .build();
    meter
        .u64_observable_counter("holdfast.telemetry.dropped")
        .with_description("Telemetry that was dropped because nobody took it")
        .with_callback(move |to| {
            let attributes = [KeyValue::new("signal", "logs"), KeyValue::new("reason", "queue_full")];
            to.observe(logs.as_ref().map_or(0, Logs::dropped), &attributes);
        })
        .build();
    process::observe(meter);
}

/// Bounds the series of every metric; the SDK counts what is beyond in one series.
fn limited(builder: MeterProviderBuilder, series: u32) -> MeterProviderBuilder {
    let limit = usize::try_from(series).unwrap_or(usize::MAX - 1).max(1);
    builder.with_view(move |_: &Instrument| Stream::builder().with_cardinality_limit(limit).build().ok())
}

fn common_labels(identity: &Identity) -> HashMap<String, String> {
    HashMap::from([
        ("cluster".to_owned(), identity.cluster.clone()),
        ("node_type".to_owned(), identity.node_type.to_owned()),
        ("node_id".to_owned(), identity.node.clone()),
        ("broker_group".to_owned(), identity.shard.clone()),
    ])
}

/// Who this is, for exporters. What the environment says wins.
fn resource(identity: &Identity, environment: &BTreeMap<String, String>) -> Resource {
    let get = |name: &str| environment.get(name).filter(|value| !value.is_empty()).cloned();
    let service = get("OTEL_SERVICE_NAME").unwrap_or_else(|| identity.service.to_owned());
    let mut attributes = vec![
        KeyValue::new("service.namespace", identity.cluster.clone()),
        KeyValue::new("service.instance.id", identity.node.clone()),
        KeyValue::new("service.version", VERSION),
        KeyValue::new("holdfast.version", VERSION),
        KeyValue::new("holdfast.commit", COMMIT),
        KeyValue::new("holdfast.cluster.name", identity.cluster.clone()),
        KeyValue::new("holdfast.broker.group", identity.shard.clone()),
        KeyValue::new("host.name", rustix::system::uname().nodename().to_string_lossy().into_owned()),
        KeyValue::new("process.pid", i64::from(std::process::id())),
        KeyValue::new("process.executable.name", env!("CARGO_PKG_NAME")),
        KeyValue::new("os.type", std::env::consts::OS),
    ];
    for (variable, key) in KUBERNETES {
        attributes.extend(get(variable).map(|value| KeyValue::new(key, value)));
    }
    Resource::builder_empty()
        .with_attributes([KeyValue::new("service.name", identity.service)])
        .with_attributes(attributes)
        .with_detector(Box::new(EnvResourceDetector::new()))
        .with_detector(Box::new(TelemetryResourceDetector))
        .with_service_name(service)
        .build()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn identity() -> Identity {
        Identity {
            service: "holdfast-broker",
            node_type: "broker",
            cluster: "demo".into(),
            node: "demo-0".into(),
            shard: "main".into(),
        }
    }

    fn metrics(exporters: &Exporters) -> Metrics {
        Metrics::new(&TelemetryConfig::default(), &identity(), exporters, &BTreeMap::new()).unwrap()
    }

    /// A line with its labels in order.
    fn sorted(line: &str) -> String {
        let Some((name, rest)) = line.split_once('{') else { return line.to_owned() };
        let (labels, value) = rest.rsplit_once('}').unwrap();
        let mut labels: Vec<&str> = labels.split(',').collect();
        labels.sort_unstable();
        format!("{name}{{{}}}{value}", labels.join(","))
    }

    #[test]
    fn names_are_exact_and_every_series_says_who_it_is_from() {
        let metrics = metrics(&Exporters::default());
        let kind = [KeyValue::new("topic", "t")];
        metrics
            .rocketmq()
            .u64_counter("rocketmq_messages_in_total")
            .with_description("In")
            .build()
            .add(3, &kind);
        let meter = metrics.rocketmq();
        let histogram = meter.u64_histogram("rocketmq_message_size");
        histogram.with_description("Size").with_boundaries(vec![1024.0, 4096.0]).build().record(7, &kind);
        metrics
            .scope("holdfast.node")
            .u64_counter("holdfast.hold.rejections")
            .with_description("No")
            .build()
            .add(1, &[]);
        let text = String::from_utf8(metrics.text().unwrap()).unwrap();
        let common = r#"broker_group="main",cluster="demo",node_id="demo-0",node_type="broker""#;
        for line in [
            format!("rocketmq_messages_in_total{{{common},topic=\"t\"}} 3"),
            format!("rocketmq_message_size_bucket{{{common},topic=\"t\",le=\"4096\"}} 1"),
            format!("holdfast_hold_rejections_total{{{common}}} 1"),
            "# TYPE holdfast_hold_rejections_total counter".into(),
        ] {
            assert!(text.lines().any(|found| sorted(found) == sorted(&line)), "{line}\n{text}");
        }
        assert_eq!(text.matches("# TYPE target_info").count(), 1);
        assert!(text.contains("service_name=\"holdfast-broker\""), "{text}");
        assert!(!text.contains("otel_scope"), "{text}");
    }

    #[test]
    fn a_node_tells_its_build_state_and_resources() {
        let metrics = metrics(&Exporters::default());
        observe_node(&metrics.scope("holdfast.node"), &Health::new(), None);
        let text = String::from_utf8(metrics.text().unwrap()).unwrap();
        for name in [
            "holdfast_build_info",
            "holdfast_node_state",
            "holdfast_telemetry_dropped_total",
            "process_cpu_time_seconds_total",
            "process_memory_usage_bytes",
            "process_memory_virtual_bytes",
            "process_open_file_descriptor_count",
            "process_thread_count",
            "process_uptime_seconds",
        ] {
            assert!(text.contains(&format!("\n{name}{{")), "{name}\n{text}");
        }
    }

    #[test]
    fn series_beyond_the_limit_are_counted_together() {
        let config = TelemetryConfig { max_series_per_metric: 100, ..TelemetryConfig::default() };
        let metrics = Metrics::new(&config, &identity(), &Exporters::default(), &BTreeMap::new()).unwrap();
        let counter = metrics.scope("holdfast.node").u64_counter("holdfast.x").with_description("X").build();
        (0..300).for_each(|n| counter.add(1, &[KeyValue::new("n", n)]));
        let text = String::from_utf8(metrics.text().unwrap()).unwrap();
        assert_eq!(text.matches("\nholdfast_x_total{").count(), 101);
        assert!(text.contains("otel_metric_overflow=\"true\""));
    }

    #[test]
    fn without_an_exporter_there_is_nothing_to_gather() {
        let exporters = Exporters { prometheus: false, ..Exporters::default() };
        let metrics = metrics(&exporters);
        observe_node(&metrics.scope("holdfast.node"), &Health::new(), None);
        assert!(metrics.text().unwrap().is_empty());
    }
}
