"""Steps as timelines: predicted from costs (simulate), measured (measured), drawn (picture); and costs (measure)."""
