//! What is shown to a scraper.

use opentelemetry_prometheus::exporter;
use prometheus::{Registry, TextEncoder};

use super::*;

fn provider(registry: &Registry, bare: bool) -> SdkMeterProvider {
    let builder = exporter().with_registry(registry.clone()).scope_info_enabled(false).without_target_info();
    let builder = if bare { builder.without_counter_suffixes() } else { builder };
    SdkMeterProvider::builder().with_reader(builder.build().unwrap()).build()
}

#[tokio::test]
async fn traffic_lag_and_waits_have_their_public_names() {
    let (bare, usual) = (Registry::new(), Registry::new());
    let providers = [provider(&bare, true), provider(&usual, false)];
    let [rocketmq, holdfast] = providers.each_ref().map(|provider| provider.meter("test"));
    let house = House::measured(&Meters { rocketmq, holdfast });

    house.send("t", 0, vec![message("a"), message("b")]).await.unwrap();
    house.send("t", 0, vec![grouped("c", "g")]).await.unwrap();
    let command = PullCommand { group: "readers".into(), commit: Some(1), ..pull("t", 1) };
    assert_eq!(bodies(&house.broker.pull(command).await.unwrap()).len(), 2);
    let held = tokio::spawn(house.broker.pull(waiting("t", 3)));
    house.held(1).await;
    house.broker.refresh_lag().await;
    let shown = |registry: &Registry| TextEncoder::new().encode_to_string(&registry.gather()).unwrap();
    let text = shown(&bare);
    for line in [
        r#"rocketmq_messages_in_total{is_system="false",message_type="normal",topic="t"} 2"#,
        r#"rocketmq_messages_in_total{is_system="false",message_type="fifo",topic="t"} 1"#,
        r#"rocketmq_messages_out_total{consumer_group="readers",is_retry="false",is_system="false",topic="t"} 2"#,
        r#"rocketmq_consumer_lag_messages{consumer_group="readers",is_retry="false",is_system="false",topic="t"} 2"#,
        r#"rocketmq_topic_create_execution_time_milliseconds_count{invocation_status="success",is_system="false"} 1"#,
        "rocketmq_broker_permission 6",
    ] {
        assert!(text.contains(line), "{line}\n{text}");
    }
    let text = shown(&usual);
    for line in [
        r#"holdfast_hold_waiters{kind="pull"} 1"#,
        r#"holdfast_hold_rejections_total{reason="per_node"} 0"#,
        "holdfast_hold_swept_total 0",
        r#"holdfast_flow_rejections_total{reason="memory",rpc_method="Send"} 0"#,
    ] {
        assert!(text.contains(line), "{line}\n{text}");
    }
    house.send("t", 0, vec![message("d")]).await.unwrap();
    held.await.unwrap().unwrap();
    let text = shown(&usual);
    assert!(text.contains(r#"holdfast_hold_duration_seconds_count{outcome="news"} 1"#), "{text}");
    assert!(text.contains("holdfast_hold_wake_latency_seconds_count 1"), "{text}");

    house.broker.delete_topic("t").await.unwrap();
    house.broker.refresh_lag().await;
    assert!(!shown(&bare).contains(r#"topic="t""#), "its series are gone");
}
