//! `holdfast.v1.Admin`.

use std::sync::Arc;

use tonic::{Request, Response, Status};

use super::{convert, status};
use crate::{
    api::metrics::{Metrics, Reasons},
    broker::{Broker, Error},
    model::Invalid,
    pb::v1::{self, admin_server::Admin},
};

/// The calls of `holdfast.v1.Admin`.
pub(in crate::api) struct AdminApi {
    broker: Broker,
    /// Name of the node.
    node: String,
    metrics: Arc<Metrics>,
}

impl AdminApi {
    pub(in crate::api) fn new(broker: Broker, node: String, metrics: Arc<Metrics>) -> Self {
        Self { broker, node, metrics }
    }
}

fn refused(error: Error) -> Status {
    status::of(&error)
}

fn invalid(invalid: Invalid) -> Status {
    status::of(&invalid.into())
}

fn counts(reasons: &Reasons) -> Vec<v1::ReasonCount> {
    let count = |(reason, count): (&str, u64)| v1::ReasonCount { reason: reason.to_owned(), count };
    reasons.list().map(count).collect()
}

type Answer<T> = Result<Response<T>, Status>;

#[tonic::async_trait]
impl Admin for AdminApi {
    async fn create_topic(&self, request: Request<v1::CreateTopicRequest>) -> Answer<v1::Topic> {
        let request = request.into_inner();
        let change = convert::topic_change(request.settings).map_err(invalid)?;
        let topic = self.broker.create_topic(&request.topic, change).await.map_err(refused)?;
        Ok(Response::new(convert::topic(&topic)))
    }

    async fn update_topic(&self, request: Request<v1::UpdateTopicRequest>) -> Answer<v1::Topic> {
        let request = request.into_inner();
        let change = convert::topic_change(request.settings).map_err(invalid)?;
        let topic = self.broker.update_topic(&request.topic, change).await.map_err(refused)?;
        Ok(Response::new(convert::topic(&topic)))
    }

    async fn delete_topic(
        &self,
        request: Request<v1::DeleteTopicRequest>,
    ) -> Answer<v1::DeleteTopicResponse> {
        self.broker.delete_topic(&request.into_inner().topic).await.map_err(refused)?;
        Ok(Response::new(v1::DeleteTopicResponse {}))
    }

    async fn list_topics(&self, request: Request<v1::ListTopicsRequest>) -> Answer<v1::ListTopicsResponse> {
        let request = request.into_inner();
        let list = convert::list(request.page_size, request.page_token, request.prefix);
        let page = self.broker.list_topics(list).await.map_err(refused)?;
        let topics = page.items.iter().map(convert::topic).collect();
        Ok(Response::new(v1::ListTopicsResponse { topics, next_page_token: page.next }))
    }

    async fn describe_topic(
        &self,
        request: Request<v1::DescribeTopicRequest>,
    ) -> Answer<v1::TopicDescription> {
        let topic = self.broker.describe_topic(&request.into_inner().topic).await.map_err(refused)?;
        Ok(Response::new(convert::topic_description(topic)))
    }

    async fn create_group(&self, request: Request<v1::CreateGroupRequest>) -> Answer<v1::Group> {
        let request = request.into_inner();
        let change = convert::group_change(request.settings).map_err(invalid)?;
        let group = self.broker.create_group(&request.group, change).await.map_err(refused)?;
        Ok(Response::new(convert::group(&group)))
    }

    async fn update_group(&self, request: Request<v1::UpdateGroupRequest>) -> Answer<v1::Group> {
        let request = request.into_inner();
        let change = convert::group_change(request.settings).map_err(invalid)?;
        let group = self.broker.update_group(&request.group, change).await.map_err(refused)?;
        Ok(Response::new(convert::group(&group)))
    }

    async fn delete_group(
        &self,
        request: Request<v1::DeleteGroupRequest>,
    ) -> Answer<v1::DeleteGroupResponse> {
        self.broker.delete_group(&request.into_inner().group).await.map_err(refused)?;
        Ok(Response::new(v1::DeleteGroupResponse {}))
    }

    async fn list_groups(&self, request: Request<v1::ListGroupsRequest>) -> Answer<v1::ListGroupsResponse> {
        let request = request.into_inner();
        let list = convert::list(request.page_size, request.page_token, request.prefix);
        let page = self.broker.list_groups(list).await.map_err(refused)?;
        let groups = page.items.iter().map(convert::group).collect();
        Ok(Response::new(v1::ListGroupsResponse { groups, next_page_token: page.next }))
    }

    async fn describe_group(
        &self,
        request: Request<v1::DescribeGroupRequest>,
    ) -> Answer<v1::GroupDescription> {
        let request = request.into_inner();
        let group = self.broker.describe_group(&request.group, &request.topic).await.map_err(refused)?;
        Ok(Response::new(convert::group_description(&group)))
    }

    async fn reset_offsets(
        &self,
        request: Request<v1::ResetOffsetsRequest>,
    ) -> Answer<v1::ResetOffsetsResponse> {
        let reset = convert::reset(request.into_inner()).map_err(invalid)?;
        let results = self.broker.reset_offsets(reset).await.map_err(refused)?;
        let results = results.into_iter().map(convert::was_reset).collect();
        Ok(Response::new(v1::ResetOffsetsResponse { results }))
    }

    async fn get_node_status(&self, _: Request<v1::GetNodeStatusRequest>) -> Answer<v1::NodeStatus> {
        let status = self.broker.node_status();
        Ok(Response::new(v1::NodeStatus {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            node: self.node.clone(),
            started: Some(convert::to_timestamp(status.started_ms)),
            shards: status.shards.into_iter().map(convert::shard).collect(),
            connections: self.metrics.connections.get(),
            held_pulls: status.held_pulls,
            connections_closed: counts(&self.metrics.closed_connections),
            connections_refused: counts(&self.metrics.refused_connections),
        }))
    }
}
