//! Which exporters the environment asks for. The one place to come to when there are more of them.

use std::collections::BTreeMap;

/// Variables that choose exporters, what may stand there, and what is used without them.
const CHOICES: [(&str, &[&str]); 3] = [
    ("OTEL_TRACES_EXPORTER", &["none"]),
    ("OTEL_METRICS_EXPORTER", &["prometheus", "none"]),
    ("OTEL_LOGS_EXPORTER", &["none"]),
];
/// Variables that mean an exporter which is not there.
const ENDPOINTS: [&str; 4] = [
    "OTEL_EXPORTER_OTLP_ENDPOINT",
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
    "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT",
    "OTEL_EXPORTER_OTLP_LOGS_ENDPOINT",
];

/// What is exported, and how.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Exporters {
    /// Metrics are gathered for `/metrics`.
    pub prometheus: bool,
    /// What the environment says and cannot be followed; told once at the start.
    pub warnings: Vec<String>,
}

impl Default for Exporters {
    fn default() -> Self {
        Self { prometheus: true, warnings: Vec::new() }
    }
}

/// The environment asks for an exporter that this version does not have.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{variable}={value} asks for an exporter that this version does not have; it offers {offered}. Unset \
     {variable} to start"
)]
pub struct ExportersError {
    variable: &'static str,
    value: String,
    offered: String,
}

impl Exporters {
    /// Reads the `OTEL_*` variables. Asking for what is not there is an error, as somebody would wait for data in
    /// vain; what is only misspelt is a warning.
    pub fn from_environment(environment: &BTreeMap<String, String>) -> Result<Self, ExportersError> {
        let get = |name: &str| environment.get(name).map(|value| value.trim()).filter(|v| !v.is_empty());
        let mut exporters = Self::default();
        if get("OTEL_SDK_DISABLED").is_some_and(|value| value.eq_ignore_ascii_case("true")) {
            return Ok(Self { prometheus: false, ..exporters });
        }
        for (variable, offered) in CHOICES {
            let Some(value) = get(variable) else { continue };
            for choice in value.split(',').map(str::trim).filter(|choice| !choice.is_empty()) {
                match choice {
                    _ if offered.contains(&choice) => {}
                    "otlp" | "console" | "zipkin" | "jaeger" => {
                        let offered = offered.join(", ");
                        return Err(ExportersError { variable, value: value.to_owned(), offered });
                    }
                    _ => exporters.warnings.push(format!(
                        "{variable}: `{choice}` is not known and ignored; known are {}",
                        offered.join(", ")
                    )),
                }
            }
            if variable == "OTEL_METRICS_EXPORTER" {
                exporters.prometheus = !value.split(',').any(|choice| choice.trim() == "none");
            }
        }
        for variable in ENDPOINTS {
            if let Some(value) = get(variable) {
                let offered = "metrics in Prometheus' format on the probe listener, and logs".to_owned();
                return Err(ExportersError { variable, value: value.to_owned(), offered });
            }
        }
        if let Some(value) = get("OTEL_CONFIG_FILE") {
            let offered = "the configuration file named by HOLDFAST_CONFIG".to_owned();
            return Err(ExportersError { variable: "OTEL_CONFIG_FILE", value: value.to_owned(), offered });
        }
        if get("OTEL_SEMCONV_STABILITY_OPT_IN").is_some() {
            exporters
                .warnings
                .push("OTEL_SEMCONV_STABILITY_OPT_IN is ignored: only the current names are used".into());
        }
        Ok(exporters)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(pairs: &[(&str, &str)]) -> Result<Exporters, ExportersError> {
        let environment = pairs.iter().map(|&(k, v)| (k.to_owned(), v.to_owned())).collect();
        Exporters::from_environment(&environment)
    }

    #[test]
    fn without_variables_metrics_are_there_for_prometheus() {
        assert_eq!(read(&[]).unwrap(), Exporters::default());
        assert_eq!(read(&[("OTEL_TRACES_EXPORTER", "none")]).unwrap(), Exporters::default());
        assert!(!read(&[("OTEL_METRICS_EXPORTER", "none")]).unwrap().prometheus);
        assert!(!read(&[("OTEL_SDK_DISABLED", "TRUE")]).unwrap().prometheus);
    }

    #[test]
    fn an_exporter_that_is_not_there_is_refused_by_name() {
        for pair in [
            ("OTEL_TRACES_EXPORTER", "otlp"),
            ("OTEL_METRICS_EXPORTER", "prometheus,otlp"),
            ("OTEL_LOGS_EXPORTER", "otlp"),
            ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector:4317"),
            ("OTEL_CONFIG_FILE", "otel.yaml"),
        ] {
            let error = read(&[pair]).unwrap_err().to_string();
            assert!(error.starts_with(&format!("{}={} ", pair.0, pair.1)), "{error}");
        }
    }

    #[test]
    fn what_is_only_misspelt_is_a_warning() {
        let exporters = read(&[("OTEL_METRICS_EXPORTER", "promethues")]).unwrap();
        assert_eq!(exporters.warnings.len(), 1);
        assert!(exporters.prometheus);
    }
}
